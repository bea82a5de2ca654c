"""Records files of NumPy for the tests of runtime/src/data/npy.rs.

Needs numpy and ml_dtypes. Run in this folder: python record.py.

NAME.npy has the elements -2 to 3 (0 to 5 where the type has no sign, their truth for bool) as [2, 3]: row-major and little-endian
but for big_f4 and big_i8, and columns_i2, which is in Fortran's order. Others: scalar (0-d, 7), empty ([3, 0, 2]), long (version 2.0
of the format), text, objects, records, complex and dates, which are refused, and wide_i8 and wide_f8 with an element too large.
stored.npz and packed.npz have f4, i8 and b1 under these names.
"""
import io, warnings
import ml_dtypes
import numpy as np

SIGNED = np.arange(-2, 4).reshape(2, 3)
KINDS = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"]


def of(kind):
    return (np.arange(6).reshape(2, 3) if kind[0] == "u" else SIGNED).astype(np.dtype(kind).newbyteorder("<"))


for kind in KINDS:
    np.save(f"{kind}.npy", of(kind))
np.save("bf16.npy", SIGNED.astype(ml_dtypes.bfloat16))
np.save("big_f4.npy", SIGNED.astype(">f4"))
np.save("big_i8.npy", SIGNED.astype(">i8"))
np.save("columns_i2.npy", np.asfortranarray(SIGNED.astype("<i2")))
np.save("scalar.npy", np.float32(7))
np.save("empty.npy", np.zeros((3, 0, 2), np.float32))
with open("long.npy", "wb") as file, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    np.lib.format.write_array(file, of("f4"), version=(2, 0))
np.save("text.npy", np.array(["a", "b"]))
np.save("objects.npy", np.array([None, 1], dtype=object), allow_pickle=True)
np.save("records.npy", np.zeros(2, dtype=[("x", "<f4"), ("y", "<i4")]))
np.save("complex.npy", np.zeros(2, dtype="<c8"))
np.save("dates.npy", np.zeros(2, dtype="<M8[s]"))
np.save("wide_i8.npy", np.array([[0, 1], [2**31, 3]]))
np.save("wide_f8.npy", np.asfortranarray([[0.0, -1e300], [1.0, 2.0]]))
arrays = {kind: of(kind) for kind in ["f4", "i8", "b1"]}
np.savez("stored.npz", **arrays)
np.savez_compressed("packed.npz", **arrays)
