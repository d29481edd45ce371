"""An executor of PTX in NumPy that looks for faults at every instruction. For tests alone: no wheel has it."""
