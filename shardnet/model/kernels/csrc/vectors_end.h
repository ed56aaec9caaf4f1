/* Ends what vectors_body.h has defined. */

#undef lanes
#undef ints
#undef uints
#undef shorts
#undef of_last
#undef REGISTERS
#undef doubles
#undef longs
#undef half
#undef HALF
#undef of_half
