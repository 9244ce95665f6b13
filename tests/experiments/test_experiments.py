"""Both experiments from command to table, with training replaced by a formula."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from experiments import intervals, paper, passes, runs
from toprlib.files import to_lines, write_file
from toprlib.records import Example, Sample
from toprlib.settings import Settings
from train_gsm8k import gsm8k_task

BEST = {"reinforce": 1e-6, "ppo": 1e-3}  # learning rates; of other methods 3e-5


class Laboratory:
    """What stands in for training and sampling, and the settings and tasks that it was called with."""

    def __init__(self):
        self.calls = []
        self.most = math.inf  # calls until it is interrupted

    def accuracy(self, settings, samples_seen):
        """Best after two passes at BEST; seeds differ by up to 20 points, equally for all methods."""
        one_pass = settings.examples or settings.n * settings.problems
        ...
