"""`dsde chaos`: faults for a running application, seeded, with a report of what was done."""
