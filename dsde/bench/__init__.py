"""The benchmarks: `dsde bench`, policies on real engines, round by round, and `dsde replay`, on recorded traces.

cell.py and contender.py say what is measured and what takes part, workload.py what is asked, engines.py measures one
run, rounds.py interleaves them within budget.py's time, table.py, report.py and plot.py tell the result. Only
engines.py imports vllm. replays.py replays policies, replay_signals.py holds signals against acceptance, and the other
replay_ files are their options, tables and pictures.
"""
