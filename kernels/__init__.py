"""Triton kernels, their launchers and their torch twins; nothing about models or ranks."""
