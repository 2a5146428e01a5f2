"""Reports of failures: what each rank of a run was doing when it failed, in files of the run's folder."""
