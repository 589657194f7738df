"""DFlash: a small non-causal decoder that fills a whole block of mask tokens in one forward (arXiv
2602.06036).
"""

from verl_opd.drafts.dflash.family import DFlash

FAMILY = DFlash()
