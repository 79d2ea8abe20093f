"""Work done in processes of its own, here or on a cluster; it knows no bug and no cache."""
