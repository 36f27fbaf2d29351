"""The benchmark behind `dsde bench`: policies on real engines, interleaved round by round on the same prompts.

cell.py and contender.py say what is measured and what takes part, workload.py what is asked, engines.py measures one
run, rounds.py interleaves them within budget.py's time, table.py, report.py and plot.py tell the result. Only
engines.py imports vllm.
"""
