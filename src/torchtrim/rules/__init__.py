"""Profile -> findings. One rule a file, `ttNNN_*.py`; its docstring is its documentation."""

from torchtrim.rules.base import Rule as Rule
from torchtrim.rules.registry import all_rules as all_rules
from torchtrim.rules.registry import diagnose as diagnose
from torchtrim.rules.registry import explain as explain
from torchtrim.rules.registry import rule as rule
