//! What two sides tell each other to be linked.

use super::error::RdmaError;

/// The length of an encoded [`LinkAddress`].
pub const ADDRESS_BYTES: usize = 32;

/// Where one end of a link is. The peer wants to know it before it can connect; it goes there by some
/// other way, which must be one that can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    /// The port's address in the network.
    pub(super) gid: [u8; 16],
    /// The number of the queue pair, of 24 bits.
    pub(super) queue_pair: u32,
    /// The number of the first packet, of 24 bits. It is random, so that stray packets of an earlier
    /// link are not taken for this one's.
    pub(super) first_packet: u32,
    /// The largest packet, as the verbs number it: 1 is 256 bytes, 5 is 4096.
    pub(super) mtu: u8,
    /// How many reads this end serves at a time.
    pub(super) reads_served: u8,
}

const BITS_24: u32 = 1 << 24;

impl LinkAddress {
    /// As bytes: the address (16), queue pair and first packet (4 each, little-endian), packet size and
    /// reads served (1 each), and six zeros.
    #[must_use]
    pub fn encode(&self) -> [u8; ADDRESS_BYTES] {
        let mut bytes = [0; ADDRESS_BYTES];
        bytes[..16].copy_from_slice(&self.gid);
        bytes[16..20].copy_from_slice(&self.queue_pair.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.first_packet.to_le_bytes());
        bytes[24] = self.mtu;
        bytes[25] = self.reads_served;
        bytes
    }

    /// From bytes that a peer sent.
    ///
    /// # Errors
    /// When they cannot have been encoded by [`LinkAddress::encode`].
    pub fn decode(bytes: &[u8; ADDRESS_BYTES]) -> Result<Self, RdmaError> {
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let address = Self {
            gid: bytes[..16].try_into().expect("16 bytes"),
            queue_pair: number(16),
            first_packet: number(20),
            mtu: bytes[24],
            reads_served: bytes[25],
        };
        let complain = |what| Err(RdmaError::BadAddress { what });
        match () {
            () if address.queue_pair >= BITS_24 => complain("its queue pair has over 24 bits"),
            () if address.first_packet >= BITS_24 => complain("its packet number has over 24 bits"),
            () if !(1..=5).contains(&address.mtu) => complain("there is no such packet size"),
            () if address.reads_served == 0 => complain("it serves no reads"),
            () if bytes[26..] != [0; 6] => complain("it ends with something unknown"),
            () => Ok(address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> LinkAddress {
        LinkAddress {
            gid: *b"0123456789abcdef",
            queue_pair: 0x12_3456,
            first_packet: 0xFF_FFFF,
            mtu: 5,
            reads_served: 16,
        }
    }

    #[test]
    fn an_address_comes_back_as_it_was() {
        assert_eq!(LinkAddress::decode(&address().encode()), Ok(address()));
    }

    #[test]
    fn what_no_address_can_be_is_refused() {
        // The highest bytes of both numbers, the packet size, the reads served, and the zeros.
        for (at, wrong) in [(19, 1), (23, 1), (24, 0), (24, 6), (25, 0), (26, 1), (31, 1)] {
            let mut bytes = address().encode();
            bytes[at] = wrong;
            assert!(LinkAddress::decode(&bytes).is_err(), "byte {at} is {wrong}");
        }
    }
}
