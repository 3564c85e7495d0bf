"""What can be done to a model. Folders that `TORCHTRIM_TECHNIQUES` names have techniques too."""

import os

__path__ += [one for one in os.environ.get("TORCHTRIM_TECHNIQUES", "").split(os.pathsep) if one]
