"""Programs for other interpreters, with packages that this one lacks."""

collect_ignore = ["trl_steps.py", "verl_steps.py"]
