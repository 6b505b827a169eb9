import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import org.apache.hadoop.fs.FileStatus;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.execution.datasources.HadoopFsRelation;
import org.apache.spark.sql.execution.datasources.LogicalRelation;
import org.apache.spark.sql.execution.datasources.PartitioningAwareFileIndex;
import org.apache.spark.sql.SparkSessionExtensions;
import scala.Function1;
import scala.Tuple2;
import scala.collection.Iterator;
import scala.collection.immutable.Map;
import scala.runtime.AbstractFunction1;
import scala.runtime.AbstractPartialFunction;
import scala.runtime.BoxedUnit;

/**
 * Makes the files that a read has listed a part of its plan: two reads of a path have equal plans only if they have
 * listed the same files. Spark finds cached data by comparing plans, and compares only the paths.
 *
 * Compiled by Janino (see spark/java/janino.py): only Java that Janino supports is used.
 */
public final class ListedFiles extends AbstractFunction1 {
    private static final String OPTION = "osrdyne.files";

    /** Spark calls it as an extension, before it builds the first session. */
    public Object apply(Object extensions) {
        ((SparkSessionExtensions) extensions).injectPostHocResolutionRule(new Rules());
        return BoxedUnit.UNIT;
    }

    public static final class Rules extends AbstractFunction1 {
        public Object apply(Object session) {
            return new Mark();
        }
    }

    public static final class Mark extends Rule {
        public org.apache.spark.sql.catalyst.trees.TreeNode apply(org.apache.spark.sql.catalyst.trees.TreeNode plan) {
            return ((LogicalPlan) plan).resolveOperators(new Relations());
        }
    }

    public static final class Relations extends AbstractPartialFunction {
        public boolean isDefinedAt(Object node) {
            if (!(node instanceof LogicalRelation) || !(((LogicalRelation) node).relation() instanceof HadoopFsRelation)) {
                return false;
            }
            HadoopFsRelation files = (HadoopFsRelation) ((LogicalRelation) node).relation();
            return files.location() instanceof PartitioningAwareFileIndex && !files.options().contains(OPTION);
        }

        public Object applyOrElse(Object node, Function1 otherwise) {
            return isDefinedAt(node) ? marked((LogicalRelation) node) : otherwise.apply(node);
        }
    }

    private static Object marked(LogicalRelation node) {
        HadoopFsRelation files = (HadoopFsRelation) node.relation();
        Object[] parts = new Object[node.productArity()];
        for (int i = 0; i < parts.length; i++) {
            parts[i] = node.productElement(i);
        }
        Map options = (Map) files.options().$plus(new Tuple2(OPTION, digest((PartitioningAwareFileIndex) files.location())));
        parts[0] = new HadoopFsRelation(
            files.location(),
            files.partitionSchema(),
            files.dataSchema(),
            files.bucketSpec(),
            files.fileFormat(),
            options,
            files.sparkSession()
        );
        return node.makeCopy(parts);
    }

    private static String digest(PartitioningAwareFileIndex index) {
        MessageDigest digest;
        try {
            digest = MessageDigest.getInstance("SHA-256");
        } catch (java.security.NoSuchAlgorithmException error) {
            throw new IllegalStateException(error);
        }
        Iterator statuses = index.allFiles().iterator();
        while (statuses.hasNext()) {
            FileStatus file = (FileStatus) statuses.next();
            String text = file.getPath() + "\n" + file.getLen() + "\n" + file.getModificationTime() + "\n";
            digest.update(text.getBytes(StandardCharsets.UTF_8));
        }
        return new BigInteger(1, digest.digest()).toString(36);
    }
}
