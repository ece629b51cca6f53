"""Which query sees which key, as a table: ``Table``, and what plans one for each kind of
pattern.
"""
