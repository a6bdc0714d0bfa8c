//! Messages of nodes and clients from bytes that anybody may have sent.

use terrace_l3_nodes::wire::{Challenge, Hello, Reply, Request};

/// Decodes arbitrary bytes: it must not panic, and a decoded message must be the same after
/// encoding and decoding it again. The first byte is the kind of the message.
///
/// # Panics
/// When it is not.
pub fn read(bytes: &[u8]) {
    if let Ok(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode(), bytes);
    }
    if let Ok(challenge) = Challenge::decode(bytes) {
        assert_eq!(challenge.encode(), bytes);
    }
    let Some((kind, body)) = bytes.split_first() else { return };
    if let Ok(request) = Request::decode(*kind, body) {
        let mut written = Vec::new();
        request.encode(&mut written);
        assert_eq!((request.kind(), &written[..]), (*kind, body));
    }
    if let Ok(reply) = Reply::decode(*kind, body) {
        let mut written = Vec::new();
        reply.encode(&mut written);
        // Errors of the medium are texts, which say where they come from once more.
        let again = Reply::decode(reply.kind(), &written).expect("what we write can be read");
        assert_eq!((again.kind(), again.gauges), (*kind, reply.gauges));
    }
}
