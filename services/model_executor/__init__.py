"""The model executor. OpenMP reads its settings when torch is loaded, so this one stands here."""

import os

# A compute thread that spins at a barrier takes the core from the thread it waits for, as soon as
# more threads want to run than there are cores: with the whole mesh on 2 cores, 10 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
