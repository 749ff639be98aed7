"""How batches reach the loop: order, plans, loader workers, streams, evaluation."""
