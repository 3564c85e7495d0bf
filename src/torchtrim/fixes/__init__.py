"""From the user's source to a fix of it: one fix a file, each with what it needs to be sound.

`reading/` finds out what the source says, `writing/` what a fix puts there. `base`, `registry`, `pages` and
`advice` serve all fixes.
"""
