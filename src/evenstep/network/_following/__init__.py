"""Links from what exchanges took, and shares for the next: observations in, plans out."""
