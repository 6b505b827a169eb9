import org.apache.spark.sql.SparkSessionExtensions;
import org.apache.spark.sql.catalyst.catalog.HiveTableRelation;
import org.apache.spark.sql.catalyst.expressions.IsNotNull;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.PlanExpression;
import org.apache.spark.sql.catalyst.plans.logical.DeleteFromTable;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.MergeIntoTable;
import org.apache.spark.sql.catalyst.plans.logical.UpdateTable;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.datasources.LogicalRelation;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.unsafe.types.UTF8String;
import scala.Function1;
import scala.runtime.AbstractFunction1;
import scala.runtime.AbstractPartialFunction;

/**
 * Lets each load of each key find only cached data of its own. Spark finds cached data by comparing plans; this rule
 * gives every table that a plan reads a condition that is always true and names the load. The optimizer removes it.
 *
 * A table below such a condition, of a session or of the SQL pipeline, stays as it is. Compiled by Janino (see
 * spark/java/janino.py): only Java that Janino supports is used.
 */
public final class OwnCachedData {
    /**
     * Adds the rule to all sessions whose state is built later. `owner` and `load` are settings of sessions, `mark` begins
     * the text of the condition.
     */
    public static void install(SparkSessionExtensions extensions, String owner, String load, String mark) {
        extensions.injectPlanNormalizationRule(new Rules(owner, load, mark));
    }

    public static final class Rules extends AbstractFunction1 {
        private final String owner;
        private final String load;
        private final String mark;

        public Rules(String owner, String load, String mark) {
            this.owner = owner;
            this.load = load;
            this.mark = mark;
        }

        public Object apply(Object session) {
            return new LoadRule(this, (SparkSession) session);
        }
    }

    /** The rule of one session. */
    public static final class LoadRule extends Rule {
        private final Rules names;
        private final SparkSession session;

        public LoadRule(Rules names, SparkSession session) {
            this.names = names;
            this.session = session;
        }

        public TreeNode apply(TreeNode plan) {
            return (TreeNode) new Marking(names.mark, nameOfLoad()).apply(plan);
        }

        private String nameOfLoad() {
            SQLConf conf = session.sessionState().conf();
            String name = conf.getConfString(names.owner, "") + " " + conf.getConfString(names.load, "");
            // A session without both was made by a handler: what it caches is its own.
            return name.equals(" ") ? session.sessionUUID() : name;
        }
    }

    /** Of a plan: its copy with the condition. */
    public static final class Marking extends AbstractFunction1 {
        private final String mark;
        private final IsNotNull condition;

        public Marking(String mark, String load) {
            this.mark = mark;
            this.condition = new IsNotNull(new Literal(UTF8String.fromString(mark + load), DataTypes.StringType));
        }

        public Object apply(Object plan) {
            if (isMarked(plan, mark) || changesTable(plan)) {
                return plan;
            }
            if (isTable(plan)) {
                return new Filter(condition, (LogicalPlan) plan);
            }
            LogicalPlan marked = (LogicalPlan) ((LogicalPlan) plan).mapChildren(this);
            return marked.transformExpressions(new Subqueries(this));
        }
    }

    public static final class Subqueries extends AbstractPartialFunction {
        private final Marking marking;

        public Subqueries(Marking marking) {
            this.marking = marking;
        }

        public boolean isDefinedAt(Object expression) {
            return expression instanceof PlanExpression && ((PlanExpression) expression).plan() instanceof LogicalPlan;
        }

        public Object applyOrElse(Object expression, Function1 otherwise) {
            if (!isDefinedAt(expression)) {
                return otherwise.apply(expression);
            }
            PlanExpression subquery = (PlanExpression) expression;
            return subquery.withNewPlan((LogicalPlan) marking.apply(subquery.plan()));
        }
    }

    private static boolean isTable(Object plan) {
        return plan instanceof LogicalRelation || plan instanceof DataSourceV2Relation || plan instanceof HiveTableRelation;
    }

    private static boolean isMarked(Object plan, String mark) {
        if (!(plan instanceof Filter) || !(((Filter) plan).condition() instanceof IsNotNull)) {
            return false;
        }
        Object child = ((IsNotNull) ((Filter) plan).condition()).child();
        return child instanceof Literal && String.valueOf(((Literal) child).value()).startsWith(mark);
    }

    /** Of commands whose child is the table that they change: Spark plans them only with the bare table. */
    private static boolean changesTable(Object plan) {
        return plan instanceof DeleteFromTable || plan instanceof UpdateTable || plan instanceof MergeIntoTable;
    }
}
