"""Techniques that change a model. The folders in `TORCHTRIM_TECHNIQUES` are searched too."""

import os

__path__ += [one for one in os.environ.get("TORCHTRIM_TECHNIQUES", "").split(os.pathsep) if one]
