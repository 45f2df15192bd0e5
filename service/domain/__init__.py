"""The pure rules: no clock, dice, environment, I/O or async."""
