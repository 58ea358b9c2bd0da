/* The type that arrays have, where it is that of the arithmetic. Another one is turned into `real`
 * where elements are read and written: in the transposes, the gathers of keys and values, and
 * packing. */
#ifndef MHA_STORAGE_H
#define MHA_STORAGE_H

enum { STORAGE_IS_REAL = true };

typedef real storage;

INLINE real to_real(storage number) { return number; }
INLINE storage to_storage(real number) { return number; }

#endif
