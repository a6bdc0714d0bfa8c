//! Placement of objects on nodes: rendezvous hashing with weights.
//!
//! Every node has a score for every object, and the highest one holds it. Adding or removing a node
//! does not change the scores of others, so only its own share moves. Generations do not count,
//! since a higher one must find the lower ones. The upper half of a key does not count either, so
//! that keys can be chosen such that objects of a namespace are on the same node.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::config::NodeAddress;
use terrace_l3::ObjectId;

/// Shares of the nodes.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    /// Hash of each node's name, and its weight.
    nodes: Vec<(u64, f64)>,
}

impl Placement {
    pub(super) fn new(nodes: &[NodeAddress]) -> Self {
        let seed = |node: &NodeAddress| xxh3_64_with_seed(node.name.as_bytes(), 0);
        Self { nodes: nodes.iter().map(|node| (seed(node), node.weight)).collect() }
    }

    /// Node that holds the object, and the one that holds its second copy.
    pub(super) fn holders(&self, id: &ObjectId) -> (usize, Option<usize>) {
        let mut bytes = [0; 24];
        bytes[..16].copy_from_slice(&id.namespace.0.to_le_bytes());
        bytes[16..].copy_from_slice(&(id.key.0 as u64).to_le_bytes());
        let mut best = (f64::MIN, 0);
        let mut second: Option<(f64, usize)> = None;
        for (number, (seed, weight)) in self.nodes.iter().enumerate() {
            let hash = xxh3_64_with_seed(&bytes, *seed);
            // Uniform in (0, 1): 53 bits and a half.
            let uniform = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            let score = -weight / uniform.ln();
            if number == 0 || score > best.0 {
                second = (number > 0).then_some(best);
                best = (score, number);
            } else if second.is_none_or(|(other, _)| score > other) {
                second = Some((score, number));
            }
        }
        (best.1, second.map(|(_, number)| number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_cache::PageKey;

    fn nodes(text: &str) -> Vec<NodeAddress> {
        text.split(',').map(|node| node.parse().unwrap()).collect()
    }

    fn ids() -> impl Iterator<Item = ObjectId> {
        (0..30_000u128).map(|number| ObjectId::page(PageKey(7), PageKey(number)))
    }

    fn names(nodes: &[NodeAddress]) -> Vec<(String, String)> {
        let placement = Placement::new(nodes);
        let name = |number: usize| nodes[number].name.clone();
        ids().map(|id| placement.holders(&id)).map(|(a, b)| (name(a), name(b.unwrap()))).collect()
    }

    fn share(holders: &[(String, String)], name: &str) -> f64 {
        holders.iter().filter(|(first, _)| first == name).count() as f64 / holders.len() as f64
    }

    #[test]
    fn shares_follow_weights() {
        let holders = names(&nodes("a:1,b:1*2,c:1*0.5"));
        for (name, expected) in [("a:1", 1.0 / 3.5), ("b:1", 2.0 / 3.5), ("c:1", 0.5 / 3.5)] {
            let found = share(&holders, name);
            assert!((found - expected).abs() < 0.01, "{name}: {found}, not {expected}");
        }
        assert!(holders.iter().all(|(first, second)| first != second));
    }

    #[test]
    fn a_node_that_comes_takes_only_its_share() {
        let (three, four) = (names(&nodes("a:1,b:1,c:1")), names(&nodes("a:1,d:1,b:1,c:1")));
        let moved = three.iter().zip(&four).filter(|((before, _), (after, _))| before != after);
        let mut count = 0;
        for (_, (after, second)) in moved {
            assert_eq!(after, "d:1");
            assert_ne!(second, "d:1");
            count += 1;
        }
        assert!((0.24..0.26).contains(&(f64::from(count) / three.len() as f64)), "{count}");
    }

    #[test]
    fn the_second_holder_takes_over_when_the_first_is_removed() {
        let (three, two) = (names(&nodes("a:1,b:1,c:1")), names(&nodes("a:1,c:1")));
        for ((first, second), (left, _)) in three.iter().zip(&two) {
            assert_eq!(left, if first == "b:1" { second } else { first });
        }
    }

    /// Clients of other versions use the same placement.
    #[test]
    fn the_placement_is_stable() {
        let placement = Placement::new(&nodes("a=h:1,b=h:2*2,c=h:3,d=h:4"));
        let holders: String =
            ids().take(32).map(|id| ["a", "b", "c", "d"][placement.holders(&id).0]).collect();
        assert_eq!(holders, "bbbbcbcacbddbcbbadbdaabdacbdbdbc");
        let id = ObjectId::page(PageKey(1 << 100), PageKey(u128::MAX));
        assert_eq!(placement.holders(&id), placement.holders(&id.with_generation(9)));
    }

    #[test]
    fn keys_with_equal_lower_halves_are_on_the_same_node() {
        let placement = Placement::new(&nodes("a:1,b:1,c:1"));
        for id in ids().take(100) {
            let beside = ObjectId::page(id.namespace, PageKey(id.key.0 | 7 << 64));
            assert_eq!(placement.holders(&id), placement.holders(&beside));
        }
    }
}
