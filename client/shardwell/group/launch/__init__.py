"""The variables by which a launcher such as mpirun or srun tells processes their ranks."""
