"""The fault campaign: what happens to stores, and whether any answer is wrong then.

``python -m campaign`` from this folder's parent, or ``make faults``.
"""
