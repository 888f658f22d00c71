"""Evidence of forgetting: tests beyond the four numbers of the paper.

◄ ADD A TEST OF FORGETTING: one file here with one `forgetting_tests.register`.

A test is computed from what was observed of single samples (`ObservedTest`), runs something on the
model (`ModelTest`), or compares many shadow models (`ShadowTest`). Every test is also run on the
retrained model, whose finding is the line to reach: a number alone shows nothing. A test that a run
cannot do is recorded with the reason, never as passed. This room may import `scenarios` and every
room below it; `findings` and `verdicts` need no torch, so that reports can read what a run found.
"""
