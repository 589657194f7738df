"""DSpark: a DFlash block whose anchor already predicts, with a low-rank bias from the token before
(vLLM qwen3_dspark.py).
"""

from verl_opd.drafts.dspark.family import DSpark

FAMILY = DSpark()
