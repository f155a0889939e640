"""GPU operators in Triton, each beside the torch reference that specifies it.

Path: engine/model/* -> here. Import an operator from the file that has its name, for example
``from kernels.rms_norm import rms_norm``. The launchers check shapes and ask ``dispatch`` which
implementation runs; nothing here imports the engine or the console.
"""
