"""What pytest must not import here."""

collect_ignore = ["verl_steps.py"]  # runs in verl's environment
