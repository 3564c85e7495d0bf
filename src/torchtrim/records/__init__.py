"""Data types that rooms exchange, and the files they are saved in. Imports nothing from the rooms above."""

from torchtrim.records.certificate import Certificate as Certificate
from torchtrim.records.certificate import Difference as Difference
from torchtrim.records.finding import Finding as Finding
from torchtrim.records.finding import Suggestion as Suggestion
from torchtrim.records.plan import Plan as Plan
from torchtrim.records.plan import Prediction as Prediction
from torchtrim.records.plan import Technique as Technique
from torchtrim.records.profile import Profile as Profile
from torchtrim.records.report import Figures as Figures
from torchtrim.records.report import Report as Report
