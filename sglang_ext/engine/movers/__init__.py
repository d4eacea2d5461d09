"""Copies between HBM and DRAM: the contract of a mover, movers for host memory and CUDA, and their order."""
