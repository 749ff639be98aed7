"""How samples become batches: in this process, in loader workers, from a stream."""
