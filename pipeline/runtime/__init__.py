"""What a run needs around its stages: processes, signals, its folder, checkpoints."""
