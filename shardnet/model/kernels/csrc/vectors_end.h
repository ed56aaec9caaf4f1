/* Ends what vectors_body.h has defined. */

#undef lanes
#undef ints
#undef uints
#undef of_last
#undef REGISTERS
