"""Kernel variants that were never measured. Nothing here runs unless it is asked for."""
