"""EAGLE-3: one decoder layer that drafts token by token from three target layers (arXiv
2503.01840), with the EAGLE-3.1 switches.
"""

from verl_opd.drafts.eagle3.family import Eagle3

FAMILY = Eagle3()
