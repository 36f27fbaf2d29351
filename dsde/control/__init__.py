"""The control layer: signals -> history -> policy -> plan. Pure: torch and the standard library."""
