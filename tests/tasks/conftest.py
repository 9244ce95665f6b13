"""verl_steps.py runs under another interpreter, with packages that this one lacks."""

collect_ignore = ["verl_steps.py"]
