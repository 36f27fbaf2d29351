"""One torch thread: these tensors are tiny, and threads that wait for each other on a busy machine take the time."""

import torch

torch.set_num_threads(1)
