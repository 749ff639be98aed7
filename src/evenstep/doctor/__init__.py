"""``torchrun ... -m evenstep.doctor``: what is wrong with a cluster, found in a minute."""
