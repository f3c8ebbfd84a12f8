"""What compilers alone can say of the kernels, on a machine without their devices."""
