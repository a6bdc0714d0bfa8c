//! Addresses that two sides exchange in order to link.

use super::error::RdmaError;

/// Length of an encoded [`LinkAddress`].
pub const ADDRESS_BYTES: usize = 32;

/// Address of one end of a link. The peer needs it to connect; it must be sent over a trusted
/// channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    /// Network address of the port.
    pub(super) gid: [u8; 16],
    /// Number of the queue pair, 24 bits.
    pub(super) queue_pair: u32,
    /// Number of the first packet, 24 bits. It is random, so that stray packets of an earlier link
    /// are not accepted.
    pub(super) first_packet: u32,
    /// Maximum packet size in the numbering of the verbs: 1 is 256 bytes, 5 is 4096.
    pub(super) mtu: u8,
    /// Number of concurrent reads that this end serves.
    pub(super) reads_served: u8,
}

const BITS_24: u32 = 1 << 24;

impl LinkAddress {
    /// Encodes the address (16 bytes), queue pair and first packet (4 each, little-endian), packet
    /// size and reads served (1 each), and six zeros.
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

    /// Decodes the bytes that a peer sent.
    ///
    /// # Errors
    /// If they are not the output of [`LinkAddress::encode`].
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
    fn an_address_is_decoded_as_it_was_encoded() {
        assert_eq!(LinkAddress::decode(&address().encode()), Ok(address()));
    }

    #[test]
    fn invalid_addresses_are_refused() {
        // The highest bytes of both numbers, the packet size, the reads served, and the zeros.
        for (at, wrong) in [(19, 1), (23, 1), (24, 0), (24, 6), (25, 0), (26, 1), (31, 1)] {
            let mut bytes = address().encode();
            bytes[at] = wrong;
            assert!(LinkAddress::decode(&bytes).is_err(), "byte {at} is {wrong}");
        }
    }
}
