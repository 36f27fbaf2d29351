"""The control layer: signals -> history -> policy -> plan. Pure: numpy and the standard library."""
