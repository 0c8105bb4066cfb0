"""Prints the folder, for LOCAL_KERNELS."""

from flashxla.hub_kernel import FOLDER

print(FOLDER)
