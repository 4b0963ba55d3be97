"""What a run shows of itself: metrics declared once, on the screen, in Ray's export, in plots and reports."""
