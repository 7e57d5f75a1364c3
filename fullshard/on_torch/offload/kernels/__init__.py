"""The Adam update on flat memory: torch, one C pass on a CPU, one Triton kernel on a GPU."""
