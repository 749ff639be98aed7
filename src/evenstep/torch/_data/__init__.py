"""How batches reach the loop; knows nothing of the modules of ``torch`` above it.

From the top: ``_prepare`` picks the loader that fits the user's data. ``loaders`` are what a loop
iterates over; ``compare`` is what ranks compare of them before they train. ``fetch`` makes samples
into batches, ``order`` draws the order of an epoch.
``deal`` says who computes which samples, in integers alone; ``_step`` is what a loop gets.
``_protocols`` is all that is asked of the rest: a session, and ways to the other ranks.
"""
