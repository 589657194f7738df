"""Names that configuration and maths share, without importing either."""

RESPONSE_LOSSES = ("forward_kl", "full_forward_kl", "cross_entropy")
REJECTED_LOSSES = ("k3",)
CONVENTIONS = ("exact", "draft_opd")
RESPONSE_SPANS = ("segment", "block")
