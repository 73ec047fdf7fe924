"""What a launcher such as mpirun or srun tells its processes of their ranks."""
