"""Names that configuration and maths share, without importing either."""

ESTIMATORS = ("k1", "k2", "k3", "abs")  # of the reverse KL, on the one token that was recorded
FULL_VOCABULARY_LOSSES = ("full_forward_kl", "tv", "lk_alpha", "lk_lambda")
BLOCK_LOSSES = ("e2e_tv",)  # of a block as a whole, rejected proposals included
# on the target's most likely tokens, as a teacher server reports them
TOP_K_LOSS = "forward_kl_topk"
RESPONSE_LOSSES = (
    "forward_kl",
    TOP_K_LOSS,
    "cross_entropy",
    *FULL_VOCABULARY_LOSSES,
    *ESTIMATORS,
    *BLOCK_LOSSES,
)
SCORED_LOSSES = (
    "forward_kl",
    *ESTIMATORS,
)  # need nothing from a teacher but its log-prob of the committed token
TEACHER_SOURCES = ("auto", "composed", "server")
REJECTED_LOSSES = ("forward_kl", *ESTIMATORS)
CONVENTIONS = ("exact", "draft_opd")
RESPONSE_SPANS = ("segment", "block")
