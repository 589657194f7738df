"""Names that configuration and maths share, without importing either."""

ESTIMATORS = ("k1", "k2", "k3", "abs")  # of the reverse KL, on the one token that was recorded
FULL_VOCABULARY_LOSSES = ("full_forward_kl", "tv", "lk_alpha", "lk_lambda")
BLOCK_LOSSES = ("e2e_tv",)  # of a block as a whole, refused proposals included
RESPONSE_LOSSES = ("forward_kl", "cross_entropy", *FULL_VOCABULARY_LOSSES, *ESTIMATORS, *BLOCK_LOSSES)
REJECTED_LOSSES = ("forward_kl", *ESTIMATORS)
CONVENTIONS = ("exact", "draft_opd")
RESPONSE_SPANS = ("segment", "block")
