"""A compiled spec: conversation -> rendering -> turns -> tokens and mask."""
