"""DeepSpeed's engine and optimizers as they run: windows, partitions, the library itself."""
